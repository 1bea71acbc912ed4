"""One of vLLM's RL examples over HTTP, its file unchanged, on a machine without a GPU.

    python vllm_example_on_cpu.py .../examples/rl/rlhf_http_ipc.py

Two things are not vLLM's. The training model stays on the CPU, whatever device the example names. And where
the example makes a trainer engine of vLLM's, which needs CUDA, it gets ours over shared memory, with its
own client and source. Its calls go to the fleet as they are, and are printed with their answers.
"""

import runpy
import sys

import requests
import torch
from vllm.distributed.weight_transfer import WeightTransferTrainerFactory

from deployments.vllm_plugin import register
from deployments.weights.transports.shm import ShmTrainerInitInfo

CALL = "[call]"


def on_the_cpu() -> None:
    torch.accelerator.set_device_index = lambda device: None
    move = torch.nn.Module.to

    def stay(self, *where, **options):
        return self if where and str(where[0]).startswith("cuda") else move(self, *where, **options)

    torch.nn.Module.to = stay


def over_shared_memory() -> None:
    register()
    init = WeightTransferTrainerFactory.trainer_init

    def trainer_init(init_info, *, client, source):
        print(f"{CALL} trainer engine {init_info.backend} replaced by shm", flush=True)
        return init(ShmTrainerInitInfo(rank=init_info.rank), client=client, source=source)

    WeightTransferTrainerFactory.trainer_init = trainer_init


def with_its_calls_printed() -> None:
    send = requests.Session.request

    def request(self, method, url, **options):
        answer = send(self, method, url, **options)
        print(f"{CALL} {method.upper()} {answer.request.path_url} {answer.status_code}", flush=True)
        return answer

    requests.Session.request = request


if __name__ == "__main__":
    on_the_cpu()
    over_shared_memory()
    with_its_calls_printed()
    runpy.run_path(sys.argv[1], run_name="__main__")
