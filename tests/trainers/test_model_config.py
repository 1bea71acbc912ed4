from collections.abc import Sequence

import pytest
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, CLIPConfig, T5Config
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from trainers import model_config
from trainers.eagle3 import new_config
from trainers.fsdp2 import model_class

TRAINED = {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES}
# Each lacks something that others have, or has it elsewhere.
UNUSUAL = ["bloom", "falcon_mamba", "glm4v", "gpt2", "mamba2", "opt", "qwen2_5_vl", "qwen3_vl", "gemma4_text"]
# Parts of other models, and those that cannot be made without their parts.
APART = ["gemma4_assistant", "gemma4_unified_assistant", "pi0", "musicgen", "musicgen_melody"]
APART += ["vision-encoder-decoder", "evolla"]
EVERY = sorted(TRAINED - {*APART})


@pytest.mark.parametrize("names", [UNUSUAL, pytest.param(EVERY, marks=pytest.mark.long)], ids=["few", "all"])
def test_every_familys_configuration_is_read_or_refused_by_name(names: Sequence[str]) -> None:
    for name in names:
        config = CONFIG_MAPPING[name]()
        assert model_config.vocabulary_size(config) > 1, name
        length = model_config.max_length(config)
        assert length is None or length > 1, name
        assert model_config.pad_token_id(config) >= 0, name
        assert all(isinstance(end, int) for end in model_config.end_token_ids(config)), name
        assert model_config.attends_to_all(config) in (True, False), name
        assert issubclass(model_class(config), (AutoModelForCausalLM, AutoModelForImageTextToText))


@pytest.mark.parametrize("name", ["gemma4_text", "gemma3n_text", "qwen3_vl"])
def test_a_new_drafter_has_the_shapes_of_its_model(name: str) -> None:
    config = CONFIG_MAPPING[name]()
    assert new_config(config).vocab_size == model_config.vocabulary_size(config)


def test_a_model_without_attention_gets_no_drafter() -> None:
    with pytest.raises(ValueError, match="has 'num_attention_heads', got 'mamba'"):
        new_config(CONFIG_MAPPING["mamba"]())


def test_any_length_is_accepted_where_there_is_no_longest() -> None:
    assert model_config.max_length(CONFIG_MAPPING["mamba"]()) is None
    assert model_config.end_token_ids(CONFIG_MAPPING["qwen3_vl"](eos_token_id=[7, 3])) == [3, 7]


@pytest.mark.parametrize(("config", "near"), [(T5Config(), "t5gemma2"), (CLIPConfig(), "blip")])
def test_a_family_that_is_no_language_model_is_refused_with_the_nearest(config: object, near: str) -> None:
    with pytest.raises(ValueError, match=f"got one of the family '.*nearest family .* is '{near}'"):
        model_class(config)  # type: ignore[arg-type]
