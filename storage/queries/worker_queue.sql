-- What waits at each inference worker, minute by minute: requests in flight and queued, its cache, its GPUs.
SELECT
    worker, to_timestamp(floor(time / 60) * 60) AS minute,
    avg(value) FILTER (name = 'entente_running') AS running,
    max(value) FILTER (name = 'vllm:num_requests_waiting') AS queued,
    max(value) FILTER (name = 'vllm:kv_cache_usage_perc') AS cache,
    avg(value) FILTER (name = 'entente_gpu_utilisation') AS gpu_utilisation,
    max(value) FILTER (name = 'entente_requests_total') AS requests
FROM workers GROUP BY ALL ORDER BY ALL
