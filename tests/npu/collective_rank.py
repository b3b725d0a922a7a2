"""One of two processes that try every collective: ``python collective_rank.py RANK PORT``. Prints the results."""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import torch.distributed as dist
import torch_npu  # noqa: F401 (the device and its process group)


def main() -> None:
    rank, port = map(int, sys.argv[1:])
    torch.npu.set_device(0)
    dist.init_process_group("hccl", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    seen: dict[str, Any] = {"backend": type(dist.group.WORLD._get_backend(torch.device("npu"))).__name__}  # type: ignore[union-attr]
    x = torch.full((5,), rank + 1.0, device="npu", dtype=torch.bfloat16)
    dist.all_reduce(x)
    seen["sum"] = x.tolist()
    large = torch.ones(600_000, device="npu")
    dist.all_reduce(large)
    seen["large"] = large.sum().item()
    gathered = torch.empty(4, device="npu")
    dist.all_gather_into_tensor(gathered, torch.full((2,), rank + 7.0, device="npu"))
    seen["gather"] = gathered.tolist()
    scattered = torch.empty(2, device="npu")
    dist.reduce_scatter_tensor(scattered, torch.arange(4.0).to("npu"))
    seen["scatter"] = scattered.tolist()
    broadcast = torch.arange(3.0).to("npu") * (rank == 0)
    dist.broadcast(broadcast, 0)
    seen["broadcast"] = broadcast.tolist()
    exchanged = torch.empty(2, device="npu")
    dist.all_to_all_single(exchanged, torch.arange(2.0).to("npu") + 10 * rank)
    seen["all to all"] = exchanged.tolist()
    letter = torch.full((40_000,), 9.0, device="npu")
    if rank == 0:
        dist.send(letter, 1)
    else:
        letter.zero_()
        dist.recv(letter, 0)
    seen["received"] = letter.sum().item()
    dist.barrier()
    dist.destroy_process_group()
    print(json.dumps(seen))


if __name__ == "__main__":
    main()
