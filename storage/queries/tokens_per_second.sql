-- Tokens drawn and trained a second, step by step, and how full the engine's batches and its prefix cache were.
PIVOT (
    SELECT step, name, value FROM metrics WHERE name IN (
        'rollout/tokens_per_s', 'rollout/occupancy', 'rollout/prefix_hit_share', 'train/tokens_per_s', 'train/unique_tokens_per_s'
    )
) ON name IN (
    'rollout/tokens_per_s', 'rollout/occupancy', 'rollout/prefix_hit_share', 'train/tokens_per_s', 'train/unique_tokens_per_s'
) USING max(value) ORDER BY step
