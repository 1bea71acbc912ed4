"""Saves checkpoints of Hugging Face as torchtitan's trainer does in two ranks: sharded, by its own
checkpointer, with its optimizer. Prints how far what the example reads of them is the same, and what it says
when the last one changes meanwhile.
"""

import json
import shutil
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.fsdp import fully_shard
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.optimizer import default_adamw
from torchtitan_models import model_registry

from examples.torchtitan_publisher import TorchtitanCheckpoint


def save(rank, saves):
    torch.set_num_threads(1)
    meeting = f"file://{saves[0]['folder']}.{saves[0]['step']}"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=2)
    for each in saves:
        spec = model_registry(each["source"])
        model = spec.model.build()
        values = spec.state_dict_adapter(spec.model, None).from_hf(
            load_file(f"{each['source']}/model.safetensors")
        )
        missing, unexpected = model.load_state_dict(values, strict=False)
        assert not unexpected and all("expert_bias" in name for name in missing), (missing, unexpected)
        for layer in model.layers.values():
            fully_shard(layer)
        fully_shard(model)
        checkpointer = CheckpointManager.Config(
            enable=True, interval=1, last_save_model_only=False, keep_latest_k=0, folder=each["folder"]
        ).build(
            dataloader=None,
            model_parts=[model],
            optimizers=default_adamw(implementation="for-loop").build(model_parts=[model]),
            lr_schedulers=None,
            states={},
            sd_adapter=None,
        )
        checkpointer.save(each["step"])
    dist.destroy_process_group()


def compare(checkpoint, source):
    read, expected = dict(checkpoint), load_file(f"{source}/model.safetensors")
    assert [(each.name, each.dtype, each.shape) for each in checkpoint.specs()] == [
        (name, tensor.dtype, tensor.shape) for name, tensor in read.items()
    ]
    common = expected.keys() & read.keys()
    same = [n for n in common if read[n].dtype == expected[n].dtype and read[n].equal(expected[n])]
    return {"others": sorted(expected.keys() ^ read.keys()), "expected": len(expected), "same": len(same)}


def error_of(checkpoint, change):
    tensors = iter(checkpoint)
    next(tensors)
    change()
    try:
        for _ in checkpoint.specs()[1:]:  # as the publisher does
            next(tensors)
    except OSError as error:
        return str(error)


if __name__ == "__main__":
    options = json.loads(sys.argv[1])
    torch.multiprocessing.spawn(save, (options["saves"],), nprocs=2)
    found = {"same": [], "errors": []}
    for each in options["saves"]:
        directory, spec = Path(each["folder"], f"step-{each['step']}"), model_registry(each["source"])
        found["same"].append(compare(TorchtitanCheckpoint(directory, spec), each["source"]))
    if options["changes"]:
        for change in ((directory / ".metadata").touch, lambda: shutil.rmtree(directory)):
            found["errors"].append(error_of(TorchtitanCheckpoint(directory, spec), change))
    print(json.dumps(found))
