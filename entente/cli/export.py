"""`entente export`: write a policy version as a folder for transformers, peft, vLLM and the Hugging Face hub."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from entente.cli.options import Run, RunsRoot, which_run
from storage.runs import LATEST


def export(
    *,
    to: Annotated[Path, Parameter(help="New folder, such as exported/mine.")],
    run: Run = LATEST,
    version: Annotated[int, Parameter(help="Policy version; -1 is the newest.")] = -1,
    merged: Annotated[bool, Parameter(help="Write whole weights, with the adapter added.", negative="")] = False,
    runs_root: RunsRoot = Path("runs"),
) -> None:
    """Write a policy version as a folder that transformers with peft, and vLLM, load as it is.

    The folder holds the adapter, tokenizer, recipe, a card with the run's own scores, and `legal_orders.py`, which draws orders
    under the legal mask. A base model from the hub is named by its id; one that was made here is included, up to 16 MB. No file
    names a folder of this machine. The folder is a player: `entente evaluate --players ./folder`.

    Examples

        entente export --run mine --to exported/mine

        entente export --run mine --version 20 --to exported/mine-20

        entente export --run mine --to exported/whole --merged

        entente evaluate --players ./exported/mine,dumbbot --opponents dumbbot --games 70
    """
    from entente.reports.publish import export_adapter, find_version
    from entente.telemetry.threads import apply_threads, usable_cores

    apply_threads(usable_cores())

    name = f"{which_run(run, runs_root)}:{'newest' if version == -1 else f'v{version}'}"
    print(export_adapter(find_version(name, runs_root), to, runs_root, merged=merged))
