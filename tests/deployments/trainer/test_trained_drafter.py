from pathlib import Path

import pytest
import torch

from deployments.trainer.spec import TrainerSpec
from tests.deployments.controller_in_process import ControllerInProcess
from tests.deployments.trainer.one_worker import everything, lines, of_step, started, trained
from tests.deployments.trainer.trainer_specs import with_config
from trainers.eagle3 import write_new_head

TRAINS = "drafter"  # read by the fixture `spec`


@pytest.mark.slow
@pytest.mark.parametrize("wire_dtype", [None, "bfloat16"])
@pytest.mark.parametrize("first", [True, False], ids=["removed", "added"])
def test_the_policy_resumes_exactly_when_a_drafter_comes_or_goes(
    spec: TrainerSpec,
    controller: ControllerInProcess,
    wire_dtype: str | None,
    first: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    spec = with_config(spec, wire_dtype=wire_dtype)
    without = with_config(spec, drafter=None)
    before, after = (spec, without) if first else (without, spec)
    straight = trained(before, controller, steps=2)
    with caplog.at_level("INFO", "ray.serve"):
        resumed = started(after, controller)
    assert "the trainer resumes from version 2, step 2" in lines(caplog)
    mine, theirs = of_step(resumed), of_step(straight)
    own = {name for name in mine if not name.startswith("drafter")}
    assert {name: mine[name] for name in own} == {name: theirs[name] for name in own}
    trained_on, expected = everything(resumed), everything(straight)
    policy = [name for name in expected if not name.startswith("drafter.")]
    assert all(torch.equal(trained_on[name], expected[name]) for name in policy)


@pytest.mark.slow
def test_another_head_than_the_stored_version_has_is_refused(
    spec: TrainerSpec, tmp_path: Path, controller: ControllerInProcess
) -> None:
    trained(spec, controller, steps=1)
    write_new_head(Path(spec.model), tmp_path / "other", draft_vocabulary=16)
    with pytest.raises(ValueError, match=r"v0*1: the drafter's 'd2t': expected shape \[16\], got none$"):
        started(with_config(spec, drafter={"model": str(tmp_path / "other")}), controller)
