-- Returns of the decisions in `incoming`, whose rows come in whole start groups.
--   blended  = $centres_gained * centres_gained + $sos_share * sos_share + $survival * survival
--   "return" = sum over this and the same power's later decisions in the fork of $discount ^ k * blended,
--              where k is how many decisions later it was made; a phase without anything to order is none
-- Summed from the last decision backwards, so that equal outcomes give equal returns to the last bit.
SELECT
    *,
    list_reduce(
        list_reverse(list(
            $centres_gained * centres_gained::DOUBLE
            + $sos_share * sos_share::DOUBLE
            + $survival * survival::DOUBLE
        ) OVER this_and_later),
        lambda later, blended: blended + $discount * later
    ) AS "return"
FROM incoming
WINDOW this_and_later AS (
    PARTITION BY shard, start_group, fork, power
    ORDER BY ply
    ROWS BETWEEN CURRENT ROW AND UNBOUNDED FOLLOWING
)
