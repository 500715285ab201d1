"""On a GPU: what the plugin reads off a worker's device, and what a look at it costs while it works.

    PYTHONPATH=.:device-libs:device-libs-humming-0.1.20 python3 -m tests.gpu.see_gpu

Exit code 0 if the device is the one that nvidia-smi names, the driver's library knows it by the UUID that the plugin
writes, and Humming's own description of a kernel reads as a recipe's `expect` would have it.
"""

import subprocess
import sys
import time
from types import SimpleNamespace
from typing import Any

from isambard_serve import gpus
from isambard_serve.engine import EngineClient
from isambard_serve.inengine.isambard_serve_inengine import model
from isambard_serve.records import Device, EngineFacts

LOOKS = 200


def facts(device: dict[str, str]) -> EngineFacts:
    """A worker's facts, of which only the device matters here."""
    values: dict[str, Any] = dict.fromkeys(EngineFacts.__struct_fields__)
    return EngineFacts(**{**values, "device": Device(**device)})


def main() -> int:
    """Looks, prints what was seen, and says whether it fits."""
    import torch

    matrix = torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda")
    read = model.device(SimpleNamespace(device=matrix.device))["device"]
    asked = subprocess.run(["nvidia-smi", "--query-gpu=uuid,pci.bus_id,name", "--format=csv,noheader"],
                           check=True, capture_output=True, text=True).stdout.splitlines()
    print("plugin:", read, "nvidia-smi:", asked)
    look = gpus.looker([facts(read)], EngineClient("http://127.0.0.1:1", ""), simulated=False)
    assert look, "the driver's library does not know it"
    for _ in range(200):
        matrix @ matrix
    began = time.monotonic()
    samples = [sample for _ in range(LOOKS) for sample in look()]
    took_ms = (time.monotonic() - began) / LOOKS * 1000
    torch.cuda.synchronize()
    print(f"a look took {took_ms:.3f} ms; the last one: {samples[-1]}")
    described = described_kernel()
    print("Humming's kernel reads as:", described)
    fits = f"{read['uuid']}, {read['pci_bus_id']}, {read['name']}" in asked
    return 0 if fits and described == ["float8e4m3 group 128"] else 1


def described_kernel() -> list[str] | None:
    """What the plugin makes of a description as vLLM has Humming make it for V4's experts."""
    from humming.config import LayerConfig

    config = LayerConfig(sm_version=90, shape_n=4096, shape_k=4096, num_experts=64, a_dtype="float8e4m3",
                         input_scale_group_size=128, b_dtype="float4e2m1", bs_dtype="float8e8m0", c_dtype="bfloat16",
                         weight_scale_group_size=32, weight_scale_type="group")
    method = type("FusedMoEMethodBase", (), {})()
    layer = SimpleNamespace(quant_method=method, humming_configs={"w13": config})
    holder = SimpleNamespace(modules=lambda: iter([layer]))
    found: list[str] | None = model.backends(SimpleNamespace(
        model_runner=SimpleNamespace(model=holder)))["input_quant"]
    return found


if __name__ == "__main__":
    sys.exit(main())
