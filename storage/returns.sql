-- Returns of the decisions in `incoming`, whose rows come in whole start groups.
--   blended  = the sum over all components of their weight times their value: $centres_gained * centres_gained, and so on
--   final    = the same with the weights of sums to the fork's end: $final_centres_gained * centres_gained, and so on
--   "return" = sum over this and the same power's later decisions in the fork of $discount ^ k * blended + final,
--              where k is how many decisions later it was made; a phase without anything to order is none
-- Summed from the last decision backwards, so that equal outcomes give equal returns to the last bit.
SELECT
    * EXCLUDE (_blended, _final),
    list_reduce(list_reverse(list(_blended) OVER this_and_later), lambda later, blended: blended + $discount * later)
    + list_reduce(list_reverse(list(_final) OVER this_and_later), lambda later, final: final + later) AS "return"
FROM (
    SELECT
        *,
        $centres_gained * centres_gained::DOUBLE
            + $sos_share * sos_share::DOUBLE
            + $draw_share * draw_share::DOUBLE
            + $survival * survival::DOUBLE
            + $leader_gap * leader_gap::DOUBLE
            + $balance * balance::DOUBLE
            + $units_dislodged * units_dislodged::DOUBLE
            + $units_driven_out * units_driven_out::DOUBLE
            + $orders_void * orders_void::DOUBLE
            + $orders_bounced * orders_bounced::DOUBLE AS _blended,
        $final_centres_gained * centres_gained::DOUBLE
            + $final_sos_share * sos_share::DOUBLE
            + $final_draw_share * draw_share::DOUBLE
            + $final_survival * survival::DOUBLE
            + $final_leader_gap * leader_gap::DOUBLE
            + $final_balance * balance::DOUBLE
            + $final_units_dislodged * units_dislodged::DOUBLE
            + $final_units_driven_out * units_driven_out::DOUBLE
            + $final_orders_void * orders_void::DOUBLE
            + $final_orders_bounced * orders_bounced::DOUBLE AS _final
    FROM incoming
)
WINDOW this_and_later AS (
    PARTITION BY shard, start_group, fork, power
    ORDER BY ply
    ROWS BETWEEN CURRENT ROW AND UNBOUNDED FOLLOWING
)
