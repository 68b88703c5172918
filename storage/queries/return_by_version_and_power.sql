-- Mean return of each policy version, by the power that it played.
SELECT policy_version, power, count(*) AS decisions, avg("return") AS mean_return, stddev_samp("return") AS deviation
FROM decisions WHERE status = 'complete' AND producer = 'local'
GROUP BY ALL ORDER BY ALL
