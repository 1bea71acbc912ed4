"""What a publisher of a part of a checkpoint sends."""

from pathlib import Path

import torch
from safetensors.torch import save_file

from app.external_publisher import whole_source
from tests.tiny_models import tiny_llama


def test_what_the_model_does_not_have_is_sent_from_the_checkpoint(tmp_path: Path) -> None:
    model = tiny_llama(0)
    model.save_pretrained(tmp_path)
    vision = torch.arange(6.0).reshape(2, 3)
    save_file({"vision.weight": vision}, tmp_path / "vision.safetensors")
    own = dict(whole_source(model, None))
    sent = dict(whole_source(model, tmp_path))
    assert sent.keys() - own.keys() == {"vision.weight"}
    assert torch.equal(sent["vision.weight"], vision)
