"""The kind of an order and whether it had an effect, against the orders and results that a test writes itself."""

import json
import random
from dataclasses import replace

import pyarrow as pa

from entente.telemetry.metrics import ORDER_KINDS
from storage.order_outcomes import NO_KIND, order_outcomes
from storage.runs import RunPaths
from storage.shards import open_shard, publish_shard
from tests.storage.make_rows import make_decision, make_phase

CASES = {
    "A PAR H": ("hold", []),
    "A BUR - MUN": ("move", ["bounce"]),
    "A MAR S A PAR": ("support", ["cut"]),
    "F MAO C A BRE - LVP": ("convoy", []),
    "F BRE - ENG": ("move", []),
    "A BRE B": ("", []),
    "WAIVE": ("", []),
}


def test_each_order_has_the_kind_of_its_third_word_and_the_result_of_its_unit(tmp_path):
    rng, paths = random.Random(1), RunPaths(tmp_path).create()
    decision = replace(make_decision(rng), orders=list(CASES))
    results = {" ".join(order.split()[:2]): found for order, (_, found) in CASES.items()}
    phase = make_phase(results=json.dumps(results))
    shard = publish_shard(paths, "p0", 0, [decision], [phase], {})
    rows = pa.table({"shard": ["p0/000000.arrow"], "row": pa.array([0], pa.int32())})
    assert open_shard(shard.path).num_rows == 1
    expected = [NO_KIND if not kind else 2 * ORDER_KINDS.index(kind) + bool(found) for kind, found in CASES.values()]
    assert order_outcomes(rows, paths.shards) == {decision.decision_id: expected}
