"""The page of a smoke test: one HTML file without scripts, network access or other files."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from reports.drawing import BLUE, INK, ORANGE, legend_above, new_plot, to_svg
from reports.write_page import page_template
from smoke.job import STAGES, StageResult
from telemetry.plain_text import shown

_ONE, _OTHER = "engine", "jump"


def html_of(device: str, results: Sequence[StageResult], preset: str, command: str, facts: Mapping[str, object]) -> str:
    """The page as text.

    Args:
        device: name of the card, or "CPU".
        preset: the recommended settings as TOML.
        command: the command line that trains with them.
        facts: versions and card.
    """
    template = page_template("smoke.html.jinja", Path(__file__).parent)
    return template.render(
        device=device,
        verdict=verdict(results),
        passed=all(result.passed for result in results),
        results=results,
        titles={stage.name: stage.title for stage in STAGES},
        rates=rates_plot({result.stage: result for result in results}),
        preset=preset,
        command=command,
        facts=facts,
        number=lambda value: f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.4g}",
        shown=shown,
    )


def verdict(results: Sequence[StageResult]) -> str:
    """One sentence over all stages."""
    failed = [result for result in results if result.state == "failed"]
    passed, skipped = sum(result.passed for result in results), sum(result.state == "not run" for result in results)
    if not failed and not skipped:
        return f"All {passed} stages passed."
    rest = f", {skipped} could not run because of that" if skipped else ""
    return f"{passed} stages passed, {len(failed)} failed{rest}; the first to fail is '{failed[0].stage}'."


def rates_plot(results: Mapping[str, StageResult]) -> str:
    """Decisions a second by requests in flight, with the rates of the jump where they were measured; "" without rates."""
    figures = results[_ONE].figures if _ONE in results else {}
    name = "decisions_per_s."
    rates = sorted((int(key.removeprefix(name)), value) for key, value in figures.items() if key.startswith(name))
    if not rates:
        return ""
    figure, (axes,) = new_plot(high=2.8)
    across, up = zip(*rates, strict=True)
    axes.plot(across, up, color=BLUE, marker="o", label="base model")
    jump = results[_OTHER].figures if _OTHER in results else {}
    for way, shape in (("on", "^"), ("off", "v")):
        if f"{way}.decisions_per_s" in jump:
            axes.scatter([across[-1]], [jump[f"{way}.decisions_per_s"]], 50, ORANGE, marker=shape, label=f"jump {way}")
    axes.set_xscale("log", base=2)
    axes.set_xticks(across, [str(each) for each in across], color=INK)
    axes.minorticks_off()
    axes.set_ylim(0, None)
    axes.set_xlabel("requests in flight")
    axes.set_ylabel("decisions a second")
    legend_above(axes)
    return to_svg(figure, "rates", "Decisions a second by requests in flight")
