"""Writes an Arrow file as a Lance dataset: `python -m benchmarks.peers.programs.write_lance ARROW STORE`."""

import sys

import pyarrow as pa


def main(arrow: str, store: str) -> None:
    """Write it in Lance's own default layout."""
    import lance  # pyright: ignore[reportMissingImports]  # only its own environment has it

    with pa.memory_map(arrow) as source:
        lance.write_dataset(pa.ipc.open_file(source).read_all(), store)


if __name__ == "__main__":
    main(*sys.argv[1:3])
