"""The registry of metric names, with unit and meaning. Unknown names are refused, so queries and reports can rely on it."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    unit: str
    meaning: str


def _group(prefix: str, **entries: tuple[str, str]) -> dict[str, Metric]:
    return {f"{prefix}/{name}": Metric(unit=unit, meaning=meaning) for name, (unit, meaning) in entries.items()}


ORDER_KINDS = ("hold", "move", "support", "convoy")
METRICS: dict[str, Metric] = (
    _group(
        "rollout",
        start_groups=("groups", "start groups rolled out for the step"),
        decisions=("decisions", "rows written"),
        failed=("forks", "forks that ended early with a reason"),
        set_aside=("files", "damaged shards, whose start groups were replayed"),
        orders_rejected=("orders", "orders the game engine refused; must be 0"),
        ready_share=("share", "of the step's own start groups that were ready when the flow asked for them"),
        prompt_tokens=("tokens", "of the prompts of the decisions counted in rollout/decisions"),
        cached_tokens=("tokens", "those of rollout/prompt_tokens that were found in the prefix cache"),
        prefix_hit_share=("share", "cached_tokens / prompt_tokens"),
        completion_tokens=("tokens", "of the same decisions, forced ones included"),
        tokens_per_s=("tokens/s", "completion tokens over the step's wall time"),
        occupancy=(
            "requests",
            "mean requests decoded together by the flow's engine, on servers those of all clients; absent without any",
        ),
        forced_share=("share", "of rollout/completion_tokens, those that had a single legal id"),
        thought_tokens_mean=("tokens", "sampled before the orders of a decision, with the end of the thought; absent without"),
        thought_truncated_share=("share", "of the thoughts, those that prompts.thinking_tokens ended, not the model"),
        preemptions=("requests", "preempted by the flow's engine because its KV cache was full; absent without a forward pass"),
        queue_ms_p50=("ms", "median wait of a request before its first scheduling; absent with a vLLM server"),
        prefill_ms_p50=("ms", "median time of a request from its first scheduling to its first token; absent as queue_ms_p50"),
        decode_ms_p50=("ms", "median time of a request from its first token to its last; with a vLLM server the whole time"),
        engine_ms_p50=("ms", "median time in the game engine per phase"),
        endpoint_decisions=("decisions", "asked of endpoints among the opponents; absent without, as the next three"),
        endpoint_unanswered=("decisions", "of them without an answer, in which default orders were played"),
        endpoint_missing_share=("share", "of the orders of these decisions, those that were not given, so that the unit held"),
        endpoint_illegal=("orders", "given by endpoints and not legal"),
    )
    | _group(
        "engine",
        engine_restarts=("engines", "restarted after a failure"),
        retries=("requests", "retried on another vLLM server, with the same seed"),
        ejections=("servers", "vLLM servers without work until they answer again"),
        readmissions=("servers", "that get work again, with the versions that they missed"),
        timeouts=("requests", "not answered by a server in time"),
        rejected_answers=("answers", "of another version or adapter, with tokens outside the table, or not finite"),
        publish_refusals=("servers", "that could not serve a new version"),
    )
    | _group(
        "train",
        loss=("nats", "loss by training.loss over branching tokens, with the terms that have a weight"),
        grad_norm=("", "largest of the step's updates, before clipping"),
        skipped=("share", "updates of the step that were skipped; 1 also where there was nothing to train on"),
        decisions=("decisions", "rows trained"),
        tokens=("tokens", "prompt and completion tokens of those rows"),
        branching_tokens=("tokens", "tokens that had more than one legal id"),
        reward=("", "mean return of the rows trained, by storage.reward_weights: centres, if only these have a weight"),
        ratio_deviation_p50=("", "median |ratio - 1| over branching tokens"),
        ratio_deviation_p99=("", "99th percentile of |ratio - 1|"),
        ratio_deviation_max=("", "largest |ratio - 1|"),
        clip_ratio_low=("share", "tokens clipped from below under a negative advantage"),
        clip_ratio_high=("share", "tokens clipped from above, under a positive advantage or by the dual clip"),
        outlier_share=("share", "tokens outside the outlier bounds"),
        masked_share=("share", "tokens that give no policy gradient: clipped or left out"),
        **{
            f"masked_{kind}_{effect}_share": (
                "share",
                f"of the branching tokens of {kind} orders {words}, those that were masked",
            )
            for kind in ORDER_KINDS
            for effect, words in (("effect", "with effect"), ("no_effect", "that failed, such as a bounce or a cut support"))
        },
        ess_ratio=("share", "(sum r)^2 / (n sum r^2) of the ratios: 1 if all tokens weigh the same"),
        log_ratio_lag0_mean=("nats", "mean |log ratio| of tokens sampled by the version trained; the alert uses it"),
        log_ratio_lag0_p50=("nats", "median of it"),
        log_ratio_lag0_p99=("nats", "99th percentile of it"),
        log_ratio_lag0_max=("nats", "largest of it"),
        ratio_lag0_deviation_p50=("", "median of how far their ratio is from 1, in either direction"),
        ratio_lag0_deviation_p99=("", "99th percentile of it"),
        learning_rate=("", "rate of the step's updates, by the schedule"),
        kl_p50=("nats", "median exact divergence from the base over the legal set"),
        kl_p99=("nats", "99th percentile of it"),
        entropy=("nats", "mean entropy over the legal set"),
        entropy_p10=("nats", "10th percentile of it"),
        entropy_p50=("nats", "median of it"),
        legal_mass_p10=("share", "10th percentile of the unmasked probability of the legal set"),
        legal_mass_p50=("share", "median of it"),
        thought_tokens=(
            "tokens",
            "of branching_tokens, those in a thought; absent without a thought, as the next seven",
        ),
        thought_grad_share=(
            "share",
            "of the sum of |dL/dlogprob| over branching tokens, that of thoughts; L: the policy loss",
        ),
        thought_log_ratio_mean=("nats", "mean |log ratio| over thought tokens"),
        thought_entropy_mean=("nats", "mean entropy over the open sets of thought tokens"),
        thought_kl_mean=("nats", "mean exact divergence from the base over those sets"),
        order_log_ratio_mean=("nats", "mean |log ratio| over the other branching tokens"),
        order_entropy_mean=("nats", "mean entropy over their legal sets"),
        order_kl_mean=("nats", "mean exact divergence from the base over those sets"),
        policy_lag_p50=("versions", "median policy lag of the rows trained"),
        policy_lag_max=("versions", "largest policy lag of the rows trained"),
        policy_lag_0_share=("share", "rows trained that the version trained sampled itself"),
        policy_lag_1_share=("share", "rows trained that lie one version behind"),
        policy_lag_2_share=("share", "rows trained that lie two versions behind"),
        policy_lag_more_share=("share", "rows trained that lie further behind"),
        start_groups=("start groups", "start groups whose rows were trained"),
        groups_eligible=("groups", "advantage groups that could be trained"),
        groups_chosen=("groups", "advantage groups that the step's ledger names"),
        groups_waiting=("groups", "eligible groups left for a later step"),
        groups_used=("groups", "groups trained in earlier steps, since the trainer was opened"),
        groups_unusable=("groups", "with fewer than 2 decisions, a failed one or a rejected order, since the trainer was opened"),
        groups_ahead=("groups", "groups of a version that the trainer has not reached"),
        groups_in_budget=("groups", "usable groups within the staleness budget, those trained in earlier steps included"),
        groups_zero_std=("groups", "of groups_in_budget, those whose returns were all equal; each counts until it is too old"),
        groups_expired=("groups", "unused groups beyond the staleness budget, since the trainer was opened"),
        refused_shards=("files", "damaged shards that the trainer has set aside since it was opened"),
        select_s=("s", "choosing rows, ledger, gathering tokens"),
        update_s=("s", "forward, backward, optimiser"),
        forward_s=("s", "forwards of it, those of the base included, as the host saw them"),
        backward_s=("s", "backwards of it, as the host saw them"),
        tokens_per_s=("tokens/s", "tokens over update_s"),
        refused_rows=("decisions", "at fault, left out with their advantage groups"),
        plan_s=("s", "splitting rows into micro-batches"),
        unique_tokens=("tokens", "tokens computed, shared prefixes once"),
        unique_tokens_per_s=("tokens/s", "unique_tokens over update_s"),
        branching_tokens_per_s=("tokens/s", "branching_tokens over update_s"),
        save_s=("s", "copying what a thread then saves and publishes, and waiting for the step before to be saved"),
    )
    | _group(
        "mismatch",
        tokens=("tokens", "branching tokens compared"),
        mean=("nats", "mean |trainer - engine| at lag 0"),
        p99=("nats", "99th percentile of it"),
        largest=("nats", "largest of it"),
        rounded=("", "1 where one of the two computes in 16 bits: the limits are those of rounding"),
    )
    | _group(
        "time",
        step_s=("s", "wall time of the step"),
        rollout_s=("s", "with a rollout task at work, whether the step waited for it or not"),
        rollout_wait_s=("s", "with a rollout task at work and nothing else: the wait for rollouts"),
        compare_s=("s", "comparing the log-probabilities of trainer and engine"),
        train_s=("s", "inside the train task"),
        publish_s=("s", "saving the step, then merging, loading, clearing the prefix cache, while nothing else was done"),
        score_s=("s", "scoring a version on held-out positions"),
        orchestration_s=("s", "the rest: Prefect, and calls between the processes"),
        orchestration_share=("share", "orchestration_s / step_s"),
        trainer_wait_s=("s", "step_s - train_s: waiting for rows, but also comparing, scoring, publishing and the flow"),
    )
    | _group(
        "queue",
        depth=("steps", "pipeline.buffer_depth of the step, which a resume may change"),
        in_flight=("start groups", "start groups still being played when the step had its rows, before more are started"),
        ready=("start groups", "start groups that the step could train on when it began; with a buffer of 2 or more, as expired"),
        expired=("groups", "advantage groups with spread that became too old since the step before, untrained"),
    )
    | _group(
        "memory",
        flow_mib=("MiB", "private memory of the flow's process, without pages of files"),
        trainer_mib=("MiB", "private memory of the trainer's processes here, without pages of files"),
        trainer_peak_mib=("MiB", "the most resident memory that the trainer process had so far, with pages of files"),
        trainer_gpu_peak_mib=("MiB", "the most GPU memory that tensors of the step took"),
    )
    | _group(
        "gpu",
        utilisation=("share", "of the time with a kernel at work, on the busiest device; a mean over the step's readings"),
        utilisation_mean=("share", "the same over all devices"),
        memory_share=("share", "most memory in use, of the fullest device's"),
        memory_used_mib=("MiB", "most memory in use, of all devices together"),
        memory_busy_share=("share", "of the time in which memory was read or written, on the busiest device"),
        power_w=("W", "power of all devices"),
        sm_clock_mhz=("MHz", "multiprocessor clock of the slowest device"),
        temperature_c=("degrees Celsius", "highest temperature of any device"),
        readings=("readings", "of all devices that the step's figures rest on"),
    )
    | _group(
        "score",
        base=("centres", "mean centres gained by the base on held-out positions"),
        trained=("centres", "the same for the trained version"),
        random=("centres", "the same for the random player"),
        teacher=("centres", "the same for the scripted player that the tiny model imitated"),
        hold=("centres", "the same for the scripted player `hold`, where the model imitated nobody"),
        mover=("centres", "the same for `mover`"),
        territorial=("centres", "the same for `territorial`"),
        dumbbot=("centres", "the same for `dumbbot`"),
        eval=("centres", "the same for a version between, measured during training"),
        eval_low=("centres", "lower end of its 95 % interval"),
        eval_high=("centres", "upper end of it"),
        eval_version=("versions", "the version that it is of"),
    )
)


_ROUNDING = 1e-6
"""Accepted float32 rounding of a share outside 0 to 1."""


def check(values: Mapping[str, float]) -> None:
    """Raise KeyError for an unregistered name, and ValueError for a share outside 0 to 1: its counts are of different things."""
    for name, value in values.items():
        if name not in METRICS:
            raise KeyError(f"metric '{name}' is not in entente.telemetry.metrics.METRICS: register it with its unit")
        if METRICS[name].unit == "share" and (value < -_ROUNDING or value > 1 + _ROUNDING):
            raise ValueError(f"metric '{name}' is a share and lies between 0 and 1, not at {value:g}")
