-- Returns of the decisions in `incoming`, whose rows come in whole start groups.
--   blended  = the sum over all components of their weight times their value: $centres_gained * centres_gained, and so on
--   "return" = sum over this and the same power's later decisions in the fork of $discount ^ k * blended,
--              where k is how many decisions later it was made; a phase without anything to order is none
-- Summed from the last decision backwards, so that equal outcomes give equal returns to the last bit.
SELECT
    *,
    list_reduce(
        list_reverse(list(
            $centres_gained * centres_gained::DOUBLE
            + $sos_share * sos_share::DOUBLE
            + $draw_share * draw_share::DOUBLE
            + $survival * survival::DOUBLE
            + $leader_gap * leader_gap::DOUBLE
            + $balance * balance::DOUBLE
            + $units_dislodged * units_dislodged::DOUBLE
            + $units_driven_out * units_driven_out::DOUBLE
            + $orders_void * orders_void::DOUBLE
            + $orders_bounced * orders_bounced::DOUBLE
        ) OVER this_and_later),
        lambda later, blended: blended + $discount * later
    ) AS "return"
FROM incoming
WINDOW this_and_later AS (
    PARTITION BY shard, start_group, fork, power
    ORDER BY ply
    ROWS BETWEEN CURRENT ROW AND UNBOUNDED FOLLOWING
)
