-- The probability that the unmasked model puts on legal tokens, step by step: its median and tenth percentile.
SELECT
    step,
    max(value) FILTER (name = 'train/legal_mass_p50') AS median,
    max(value) FILTER (name = 'train/legal_mass_p10') AS tenth_percentile
FROM metrics GROUP BY step HAVING median IS NOT NULL ORDER BY step
