-- Each reward component's mean, variance, and share of the summed variance: what the returns could be made of.
SELECT component, avg(value) AS mean, var_samp(value) AS variance, variance / sum(variance) OVER () AS share_of_variance
FROM (
    UNPIVOT (
        SELECT
            centres_gained, sos_share, draw_share, survival, leader_gap, balance,
            units_dislodged, units_driven_out, orders_void, orders_bounced
        FROM decisions WHERE producer = 'local'
    ) ON COLUMNS(*) INTO NAME component VALUE value
)
GROUP BY component ORDER BY variance DESC, component
