-- How busy the trainer host's GPUs were, minute by minute: time with a kernel, time of memory access, memory, power.
SELECT
    device, to_timestamp(floor(time / 60) * 60) AS minute,
    avg(value) FILTER (name = 'utilisation') AS utilisation,
    avg(value) FILTER (name = 'memory_busy_share') AS memory_busy,
    max(value) FILTER (name = 'memory_share') AS memory,
    avg(value) FILTER (name = 'power_w') AS power_w,
    avg(value) FILTER (name = 'sm_clock_mhz') AS sm_clock_mhz,
    max(value) FILTER (name = 'temperature_c') AS temperature_c
FROM devices GROUP BY ALL ORDER BY ALL
