-- Views for queries, beside the index's own tables.

-- Every completion position: token, logprob, number of legal tokens. The legal set of a thought token is -1 - excluded, end, and
-- further excluded ids: every id below end, except these.
CREATE VIEW tokens AS
SELECT
    decision_id,
    place::INTEGER AS place,
    input_ids[prompt_len + place + 1] AS token,
    token_text(token) AS "text",
    behaviour_logprobs[place + 1] AS logprob,
    CASE WHEN legal_ids[begin + 1] < 0 THEN legal_ids[begin + 2] - (size - 1) ELSE size END AS legal_tokens,
    size = 1 AS forced,
    legal_ids[begin + 1] < 0 AS thought
FROM (
    SELECT *, legal_offsets[place + 1] AS begin, legal_offsets[place + 2] - begin AS size
    FROM (SELECT *, unnest(range(len(behaviour_logprobs))) AS place FROM payload)
);

-- What the model wrote before its orders: tokens, their logprob, text without the end marker, whether the budget ended it.
CREATE VIEW thoughts AS
SELECT decision_id, tokens, logprob, found."text" AS "text", found.truncated AS truncated
FROM (
    SELECT *, read_thought(input_ids[prompt_len + 1 : prompt_len + tokens]) AS found,
        list_sum(behaviour_logprobs[:tokens]) AS logprob
    FROM (SELECT *, len(list_filter(legal_ids, lambda id: id < 0))::INTEGER AS tokens FROM payload)
    WHERE tokens > 0
);

-- Policy lag of the rows of each step.
CREATE VIEW lag AS
SELECT step, policy_lag, count(*)::INTEGER AS decisions
FROM batches GROUP BY ALL ORDER BY ALL;

-- Snapshots that forks began at, with their returns.
CREATE VIEW snapshots AS
SELECT
    d.snapshot_id,
    count(DISTINCT (d.producer, d.start_group))::INTEGER AS start_groups,
    count(DISTINCT (d.producer, d.start_group, d.fork))::INTEGER AS forks,
    avg(d."return") AS mean_return,
    (SELECT avg(g.return_range) FROM advantage_groups AS g WHERE g.usable AND g.snapshot_id = d.snapshot_id) AS mean_return_range,
    max(d.policy_version) AS newest_version
FROM decisions AS d GROUP BY d.snapshot_id ORDER BY d.snapshot_id;
