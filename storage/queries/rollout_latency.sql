-- Milliseconds of a decision, by policy version: waiting, prefill, decoding (vLLM: these in one), and the game engine.
SELECT
    policy_version,
    quantile_cont(nullif(queue_ms, 0), 0.5) AS queue_p50, quantile_cont(nullif(queue_ms, 0), 0.99) AS queue_p99,
    quantile_cont(nullif(prefill_ms, 0), 0.5) AS prefill_p50, quantile_cont(nullif(prefill_ms, 0), 0.99) AS prefill_p99,
    quantile_cont(decode_ms, 0.5) AS decode_p50, quantile_cont(decode_ms, 0.99) AS decode_p99,
    quantile_cont(engine_ms, 0.5) AS game_p50, quantile_cont(engine_ms, 0.99) AS game_p99
FROM decisions GROUP BY policy_version ORDER BY policy_version
