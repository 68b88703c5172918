-- Views for queries, beside the index's own tables.

-- Every completion position: token, logprob, number of legal tokens. A thought token has an open set (decoding/open_set.py).
CREATE VIEW tokens AS
SELECT
    decision_id,
    place::INTEGER AS place,
    input_ids[prompt_len + place + 1] AS token,
    token_text(token) AS "text",
    behaviour_logprobs[place + 1] AS logprob,
    CASE
        WHEN legal_ids[legal_offsets[place + 1] + 1] < 0 THEN legal_ids[legal_offsets[place + 1] + 2] - 1
        ELSE legal_offsets[place + 2] - legal_offsets[place + 1]
    END AS legal_tokens,
    legal_tokens = 1 AS forced,
    legal_ids[legal_offsets[place + 1] + 1] < 0 AS thought
FROM (SELECT *, unnest(range(len(behaviour_logprobs))) AS place FROM payload);

-- Every decision: the tokens of its thought, the first of its completion, and their log-probability.
CREATE VIEW thoughts AS
SELECT
    decision_id,
    len(list_filter(legal_ids, lambda id: id < 0))::INTEGER AS thought_tokens,
    coalesce(list_sum(behaviour_logprobs[:thought_tokens]), 0) AS logprob
FROM payload;

-- Policy lag of the rows of each step.
CREATE VIEW lag AS
SELECT lineage, step, policy_lag, count(*)::INTEGER AS decisions
FROM batches GROUP BY ALL ORDER BY ALL;

-- Snapshots that forks began at, with their returns.
CREATE VIEW snapshots AS
SELECT
    d.snapshot_id,
    count(DISTINCT (d.producer, d.start_group))::INTEGER AS start_groups,
    count(DISTINCT (d.producer, d.start_group, d.fork))::INTEGER AS forks,
    avg(d."return") AS mean_return,
    (
        SELECT avg(g.spread) FROM advantage_groups AS g
        SEMI JOIN decisions AS of_it
            ON of_it.snapshot_id = d.snapshot_id AND of_it.shard = g.shard AND of_it.start_group = g.start_group
    ) AS mean_spread,
    max(d.policy_version) AS newest_version
FROM decisions AS d GROUP BY d.snapshot_id ORDER BY d.snapshot_id;

-- The rows that the steps of the current lineage and its ancestors trained on.
CREATE VIEW trained AS
SELECT b.* FROM batches AS b JOIN ancestry AS a ON b.lineage = a.lineage AND b.step <= a.until
ORDER BY b.step, b.place;
