"""What these tests share. They run in vLLM's environment, which lacks most of what `tests/conftest.py` imports; `tests/inference/
test_vllm_environment.py` starts them there."""

from pathlib import Path

import pytest
from hypothesis import settings

from entente.decoding.codec import Codec

settings.register_profile("entente", deadline=None)
settings.load_profile("entente")


@pytest.fixture(scope="session")
def codec() -> Codec:
    return Codec(Path(__file__).resolve().parents[2] / "models" / "whole-192")
