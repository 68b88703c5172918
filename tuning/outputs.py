"""Results of the tuner: settings as TOML, rows of a table, and the grid for vLLM's sweep. Pure functions."""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from inference.settings import InferenceSettings
from inference.vllm_arguments import slot_rank
from tuning.candidates import AXES, Candidate
from tuning.choose import NOISE, cost_per_thousand, misses
from tuning.figures import FIGURES
from tuning.job import Measured
from tuning.settings import TuneSettings

_VLLM = {
    "max_sequences": "max_num_seqs",
    "max_batched_tokens": "max_num_batched_tokens",
    "gpu_memory_share": "gpu_memory_utilization",
    "block_size": "block_size",
    "prefix_caching": "enable_prefix_caching",
}
"""Our setting -> vLLM's option."""


def tuned_toml(chosen: Candidate, *, on_gpu: bool, remarks: Sequence[str] = ()) -> str:
    """The chosen settings as a file for `--config`; `remarks` become its first lines."""
    foreign = "kv_cache_gib" if on_gpu else "gpu_memory_share"
    values = {name: getattr(chosen.settings, name) for name in AXES if name != foreign}
    if chosen.concurrency:
        values["max_in_flight"] = chosen.concurrency
    lines = [f"# {line}" for remark in remarks for line in remark.splitlines()]
    return "\n".join([*lines, "[inference]", *(f"{name} = {json.dumps(value)}" for name, value in values.items()), ""])


def sweep_files(candidates: Sequence[Candidate], tuning: TuneSettings) -> dict[str, list[dict[str, Any]]]:
    """`--serve-params` and `--bench-params` of `vllm bench sweep serve`, for the axes that it has.

    It draws without masks, and with adapters only if both commands name one (docs/tuning.md).
    """
    serve: dict[str, dict[str, Any]] = {}
    bench: dict[str, dict[str, Any]] = {}
    for candidate in candidates:
        settings = candidate.settings
        values = {theirs: getattr(settings, ours) for ours, theirs in _VLLM.items()}
        if settings.adapters != "merge_reload":
            lora = {"enable_lora": True, "max_loras": settings.adapter_slots, "max_lora_rank": slot_rank(settings.adapter_rank)}
            values |= lora
        serve.setdefault(json.dumps(values), values)
        load: dict[str, Any] = {"num_prompts": tuning.asked}
        load |= {"max_concurrency": candidate.concurrency} if candidate.concurrency else {"request_rate": candidate.request_rate}
        shared = round(tuning.random_shared * tuning.random_prompt_tokens)
        load |= {
            "dataset_name": "random",
            "random_prefix_len": shared,
            "random_input_len": tuning.random_prompt_tokens - shared,
            "random_output_len": tuning.random_completion_tokens,
        }
        bench.setdefault(json.dumps(load), load)
    return {"serve-params": list(serve.values()), "bench-params": list(bench.values())}


COLUMNS = (
    ("dec/s on", "on", "decisions_per_s", "{:,.1f}"),
    ("off", "off", "decisions_per_s", "{:,.1f}"),
    ("P99 ms", "on", "e2el_ms_p99", "{:,.0f}"),
    ("mean", "on", "e2el_ms_mean", "{:,.0f}"),
    ("TTFT", "on", "ttft_ms_mean", "{:,.0f}"),
    ("P99", "on", "ttft_ms_p99", "{:,.0f}"),
    ("TPOT", "on", "tpot_ms_mean", "{:,.1f}"),
    ("P99 ", "on", "tpot_ms_p99", "{:,.1f}"),
    ("ITL", "on", "itl_ms_mean", "{:,.1f}"),
    ("P99  ", "on", "itl_ms_p99", "{:,.1f}"),
    ("CPU ms", "on", "cpu_ms", "{:,.1f}"),
    ("tok/s", "on", "tokens_per_s", "{:,.0f}"),
    ("hits", "on", "cache_hit", "{:.0%}"),
    ("±", "on", "spread", "{:.0%}"),
)
"""Heading, arm, figure and format of each column."""


def table_rows(
    candidates: Sequence[Candidate], found: Mapping[str, Measured], tuning: TuneSettings, varied: list[str], chosen: str
) -> list[dict[str, str]]:
    """One row for each candidate, the fastest first, those without a measurement last with the reason.

    Args:
        chosen: key of the chosen candidate.
    """

    def order(candidate: Candidate) -> float:
        measured = found.get(candidate.key)
        return -measured.arms["on"].decisions_per_s if measured and measured.arms else 0.0

    rows = []
    for candidate in sorted(candidates, key=order):
        measured = found.get(candidate.key)
        row = {"candidate": candidate.label(varied)}
        row |= dict.fromkeys([*(heading for heading, *_ in COLUMNS), "goodput"], "")
        if measured is None:
            note = "not measured yet"
        elif not measured.arms:
            note = f"{measured.state}: {measured.reason}"
        else:
            row |= {heading: form.format(getattr(measured.arms[arm], name)) for heading, arm, name, form in COLUMNS}
            row |= {"goodput": f"{measured.arms['on'].goodput_per_s(tuning.max_latency_ms):,.1f}"}
            note = "chosen" if candidate.key == chosen else "misses" if misses(measured.arms["on"], tuning) else ""
        rows.append(row | {"note": note})
    return rows


def figures_of(candidate: Candidate | None, found: Mapping[str, Measured], tuning: TuneSettings) -> dict[str, Any] | None:
    """A candidate as plain values: settings, figures of both arms and cost; None without a measurement."""
    measured = found.get(candidate.key) if candidate is not None else None
    if candidate is None or measured is None:
        return None
    figures_out: dict[str, Any] = {"key": candidate.key, "current": candidate.current, "settings": candidate.values}
    figures_out |= {"state": measured.state, "reason": measured.reason, "log": measured.log, "adapters": measured.adapters}
    figures_out |= {"engine": measured.engine, "start_s": round(measured.start_s, 2), "seconds": round(measured.seconds, 2)}
    figures_out |= {"cpu_s": round(measured.cpu_s, 2)}
    for arm, figures in measured.arms.items():
        figures_out[arm] = {name: round(getattr(figures, name), 4) for name in FIGURES}
        figures_out[arm]["goodput_per_s"] = round(figures.goodput_per_s(tuning.max_latency_ms), 4)
        if tuning.price_per_hour:
            figures_out[arm]["cost_per_thousand"] = round(cost_per_thousand(figures.decisions_per_s, tuning.price_per_hour), 6)
    if measured.arms:
        figures_out["misses"] = [sentence for _, sentence in misses(measured.arms["on"], tuning)]
    return figures_out


def before_after(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """The figures of the current and the chosen settings, one line each."""
    one, other = before["on"], after["on"]
    lines = []
    for name, words, form in (
        ("decisions_per_s", "decisions a second", "{:,.1f}"),
        ("goodput_per_s", "of them within the latency", "{:,.1f}"),
        ("tokens_per_s", "tokens a second", "{:,.0f}"),
        ("e2el_ms_mean", "latency, mean ms", "{:,.0f}"),
        ("e2el_ms_p99", "latency, P99 ms", "{:,.0f}"),
        ("ttft_ms_mean", "to the first token, mean ms", "{:,.0f}"),
        ("ttft_ms_p99", "to the first token, P99 ms", "{:,.0f}"),
        ("tpot_ms_mean", "a further token, mean ms", "{:,.2f}"),
        ("tpot_ms_p99", "a further token, P99 ms", "{:,.2f}"),
        ("itl_ms_mean", "between two tokens, mean ms", "{:,.2f}"),
        ("itl_ms_p99", "between two tokens, P99 ms", "{:,.2f}"),
        ("cpu_ms", "CPU time of a decision, ms", "{:,.1f}"),
        ("cache_hit", "from the prefix cache", "{:.1%}"),
        ("cost_per_thousand", "cost of a thousand decisions", "{:,.4f}"),
    ):
        if name in one and name in other:
            ratio = f"  x {other[name] / one[name]:.2f}" if one[name] else ""
            lines.append(f"{words:<30} {form.format(one[name]):>10} -> {form.format(other[name]):>10}{ratio}")
    return lines


def as_config(settings: InferenceSettings) -> dict[str, Any]:
    """The settings that all candidates share; each set of them has its own folder of results."""
    here = ("model", "engine", "adapter_slots", "dtype", "max_model_length", "long_prefill_tokens", "quantization")
    return {name: getattr(settings, name) for name in (*here, "enforce_eager", "threads")}


def slots_or_merged(candidates: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, str]], str]:
    """Compare LoRA slots with merged weights: rows of a table, and one sentence of advice.

    Args:
        candidates: plain values (`figures_of`) of one candidate with slots and one with merged weights.
    """
    ways = {each["settings"]["adapters"]: each for each in candidates}
    slots, merged = ways["slots"], ways["merge_reload"]
    arms = [("merged weights", merged, "on"), ("slots", slots, "on"), ("slots, requests without an adapter", slots, "off")]
    base = merged["on"]["decisions_per_s"] if "on" in merged else math.nan
    rows = [
        {
            "served as": name,
            "decisions/s": f"{way[arm]['decisions_per_s']:,.1f}",
            "times": "-" if math.isnan(base) else f"{base / way[arm]['decisions_per_s']:.2f}",
            "P99 ms": f"{way[arm]['e2el_ms_p99']:,.0f}",
        }
        for name, way, arm in arms
        if arm in way
    ]
    for name, way in (("merged weights", merged), ("slots", slots)):
        if "on" not in way:
            return rows, f"{name} could not be measured ({way['state']}: {way['reason']})"
    times = base / slots["on"]["decisions_per_s"]
    if abs(times - 1) <= NOISE:
        return rows, f"either way is as fast: they differ by no more than {NOISE:.0%}"
    better = "merge_reload" if times > 1 else "slots"
    return rows, f"slots take {times:.2f} times the time of merged weights: set inference.adapters '{better}'"
