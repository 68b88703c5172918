"""vLLM's server loads our logits processor, so what that imports needs no package beside numpy and torch."""

import subprocess
import sys
from base64 import b64encode

from entente.inference.legal_admission import SAMPLING_KEY, TABLE_KEY
from tests.command import ROOT
from tests.inference.test_sampling import thought

_SERVER = f"""
import sys, types
import numpy, torch
def stand_in(name, **parts):
    sys.modules[name] = types.ModuleType(name)
    vars(sys.modules[name]).update(parts)
class Parameters:
    extra_args = {{{TABLE_KEY!r}: sys.argv[1], {SAMPLING_KEY!r}: [7, 1.0]}}
    stop_token_ids, ignore_eos, max_tokens, temperature = [5], True, None, 0
stand_in("vllm", SamplingParams=Parameters)
stand_in("vllm.v1")
stand_in("vllm.v1.sample")
stand_in("vllm.v1.sample.logits_processor", BatchUpdate=object, LogitsProcessor=object, MoveDirectionality=object)
known = set(sys.modules)

from entente.inference import legal_processor
legal_processor.LegalOrderProcessor.validate_params(Parameters())
rows = legal_processor.LegalRows(1, "cpu")
rows.add(0, legal_processor.admitted_table(Parameters(), 6), [], 0, legal_processor.sampling_of(Parameters()))
assert torch.isfinite(rows.apply(torch.zeros(1, 6))).sum() == 1
print(*sorted(name for name in set(sys.modules) - known if name.partition(".")[0] not in sys.stdlib_module_names))
"""


def test_the_processor_needs_numpy_and_torch_alone():
    table = b64encode(thought(4, 5).to_bytes()).decode()
    server = subprocess.run([sys.executable, "-c", _SERVER, table], cwd=ROOT, capture_output=True, text=True, check=False)
    assert server.returncode == 0, server.stderr
    loaded = [name for name in server.stdout.split() if name.partition(".")[0] not in ("numpy", "torch")]
    assert "entente.decoding.legal_table" in loaded
    assert {name.partition(".")[0] for name in loaded} == {"entente"}
    packages = {name.split(".")[1] for name in loaded if "." in name}
    assert packages == {"decoding", "inference", "telemetry"}
    assert "entente.decoding.table_builder" not in loaded
