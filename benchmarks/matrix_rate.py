"""`trainer --model`: our step on a model of your own, beside the rate at which this machine multiplies matrices of its shapes.

    rate share = u (4 B + 6 A) / t  over  rate

u   unique tokens of the step: a forward and a backward to the activations through the linear layers of the base (2 B operations
    each), and the adapter's forward, backward to the activations and backward to its weights (2 A each)
B   weights of the base's linear layers; A weights of the adapter; t CPU seconds of the step on one thread

The rate is measured in turn with the step, with as many rows as a micro-batch has tokens. Attention scores, norms, the head and
planning count as nothing done, so no program reaches 1.
"""

from pathlib import Path
from statistics import median

from benchmarks.outcome import cpu_seconds
from benchmarks.trainer_arms import Steps, update_rows
from benchmarks.trainer_cases import CASES, made_up_batch
from entente.decoding.architectures import read_architecture
from entente.decoding.codec import Codec
from entente.telemetry.progress import reporter
from entente.training.first_guess import block_products
from entente.training.policy import Policy
from entente.training.settings import CPU_TOKENS, TrainingSettings
from entente.training.trie_plan import plan


def rate_figures(model: Path, *, repeats: int, seed: int) -> dict[str, float]:
    """Our step on made-up rows of one position: seven powers, six forks each."""
    sizes, settings = read_architecture(model), TrainingSettings(device="cpu")
    batch = made_up_batch(CASES["trie"], vocabulary=Codec(model).vocabulary_size, seed=seed)
    steps = Steps(Policy(model, settings), settings)
    unique = sum(plan(batch, rows, CPU_TOKENS).unique_tokens for rows in update_rows(batch, settings))
    arithmetic = unique * (4 * sizes.linear_parameters + 6 * sizes.lora_parameters(settings.lora_rank))
    step, products, spent, rates = steps.ours(), block_products(sizes, rows=unique), [], []
    for number in range(repeats + 1):
        step_s, products_s = cpu_seconds(lambda: step(batch)), cpu_seconds(products)
        if number:  # the first warms up
            spent.append(step_s)
            rates.append(2.0 * unique * sizes.linear_parameters / sizes.layers / products_s)
            reporter().say(f"round {number} of {repeats}: {unique / step_s:,.0f} unique tokens a CPU second")
    share = median(arithmetic / seconds / rate for seconds, rate in zip(spent, rates, strict=True))
    return {
        "rate_share": share,
        "step_gflops": arithmetic / median(spent) / 1e9,
        "matrix_gflops": median(rates) / 1e9,
        "unique_tokens": float(unique),
        "unique_tokens_per_cpu_s": unique / median(spent),
    }
