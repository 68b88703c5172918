-- How often the teacher prefers other orders than the student's first draw, and by how much, for each round and student.
SELECT
    "round", policy_version, count(*) AS distil_targets, avg((best_orders <> first_orders)::INTEGER) AS disagrees,
    avg("values"[list_position(orders, best_orders)] - "values"[1]) AS first_draw_costs
FROM distil_targets GROUP BY ALL ORDER BY ALL
