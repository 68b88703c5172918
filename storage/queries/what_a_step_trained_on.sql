-- What each step trained on: decisions, advantage groups, versions, and the mean return.
SELECT
    step, count(*) AS decisions, count(DISTINCT advantage_group) AS groups,
    min(policy_version) AS oldest_version, max(policy_version) AS newest_version, avg("return") AS mean_return
FROM batches GROUP BY step ORDER BY step
