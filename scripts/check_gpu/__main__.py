"""`make check-gpu`: what a run on a GPU needs of vLLM, checked without one.

1. The Python files of the CUDA wheel of the pinned vLLM are compared with those of the installed build.
2. Every name of vLLM that this code uses, and every method that it wraps, is looked up in that wheel, as text.
3. The same for an older release, as a table: what would not work with it.
4. vLLM's V2 sampler draws under the legal mask, its kernels in Triton's interpreter.

Exit code 1: a name is missing or changed in the pinned version, or a kernel draws wrongly.
"""

import argparse
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from scripts.check_gpu import contract
from scripts.check_gpu.check import troubles
from scripts.check_gpu.lock import ROOT
from scripts.check_gpu.source import VllmSource
from scripts.check_gpu.uses import Use, collect
from scripts.check_gpu.wheels import compare, get_wheel, installed, pinned_version, wheels_folder
from telemetry.errors import EntenteError

OLDER = "0.26.0"
"""A release that machines with torch 2.11 can have; it need not work."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    parser = argparse.ArgumentParser(
        prog="make check-gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only-names", action="store_true", help="steps 1 and 2 alone")
    asked = parser.parse_args(arguments)
    folder, version, uses = wheels_folder(), pinned_version(), collect(ROOT, contract.FOLDERS)
    try:
        wrong = report_pinned(VllmSource(get_wheel(folder, version)), version, uses)
        if not asked.only_names:
            report_older(folder, uses)
            wrong += run_kernels()
    except EntenteError as error:
        print(f"check-gpu: {error}", file=sys.stderr)
        return error.exit_code
    if wrong:
        print(f"check-gpu: {'; '.join(wrong)}: see the lines above", file=sys.stderr)
        return 1
    print("check-gpu: nothing is missing. No card was used: speed and memory are unmeasured.")
    return 0


def report_pinned(wheel: VllmSource, version: str, uses: Sequence[Use]) -> list[str]:
    """Print steps 1 and 2; returns what is wrong."""
    report_files(wheel, version, uses)
    found = troubles(uses, wheel)
    for each in found:
        print(f"  {each}")
    needed = [each for each in found if not each.optional]
    print(f"names: {len(uses)} uses of vLLM in this code, {len(needed)} missing or changed in vLLM {version} for CUDA")
    return [f"{len(needed)} names that this code uses are missing or changed in vLLM {version} for CUDA"] if needed else []


def report_files(wheel: VllmSource, version: str, uses: Sequence[Use]) -> None:
    """Print step 1."""
    here = installed()
    if here is None:
        print(f"files: no vLLM is installed here, so those of vLLM {version} for CUDA are compared with nothing")
        return
    place, name = here
    found = compare(wheel, VllmSource(place))
    print(f"files: vLLM {version} for CUDA and {name} have {found.equal} equal Python files, and {len(found.differ)} that differ")
    if len(found.differ) <= 20:
        used = {wheel.path_of(use.module) for use in uses}
        for path in found.differ:
            print(f"  {path}{': this code uses it' if path in used else ''}")
    for where, paths in (("the wheel", found.only_in_wheel), (name, found.only_installed)):
        folders = Counter("/".join(Path(path).parts[:3]) for path in paths)
        if folders:
            print(f"  only in {where}: {', '.join(f'{folder} ({count})' for folder, count in sorted(folders.items())[:12])}")


def report_older(folder: Path, uses: Sequence[Use]) -> None:
    """Print step 3. What is missing there is no failure."""
    try:
        found = troubles(uses, VllmSource(get_wheel(folder, OLDER)))
    except EntenteError as error:
        print(f"vLLM {OLDER} was not looked at: {error}")
        return
    print(f"with vLLM {OLDER} these would not be there, or be others ({len(found)}):")
    for each in found:
        print(f"  {each}")


def run_kernels() -> list[str]:
    """Run step 4 in a process of its own, since Triton's interpreter is chosen at import; returns what is wrong."""
    done = subprocess.run(
        [sys.executable, "-m", "scripts.check_gpu.kernels"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    print(done.stdout.strip() or done.stderr.strip()[-2000:])
    return ["vLLM's V2 sampler did not draw as the oracle says"] if done.returncode else []


if __name__ == "__main__":
    sys.exit(main())
