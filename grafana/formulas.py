"""What the dashboards and rules compute, each formula once, as PromQL."""

from __future__ import annotations

from dataclasses import dataclass, replace

from dyntree_plugin.metrics.names import PREFIX


@dataclass(frozen=True)
class Scope:
    """Over which series, which time and which labels a formula sums."""

    selector: str = ""
    window: str = "5m"
    by: tuple[str, ...] = ("model_name",)

    def per(self, *labels: str) -> Scope:
        """The same, told apart by more labels."""
        return replace(self, by=(*self.by, *labels))

    def series(self, metric: str, where: str = "") -> str:
        conditions = ",".join(part for part in (self.selector, where) if part)
        return f"{metric}{{{conditions}}}" if conditions else metric

    def total(self, vector: str) -> str:
        return f"sum by ({', '.join(self.by)}) ({vector})" if self.by else f"sum({vector})"

    def rate(self, metric: str, where: str = "") -> str:
        """Sum of the series' increase per second."""
        vector = f"rate({self.series(metric, where)}[{self.window}])"
        return self.total(vector if metric.startswith(PREFIX) else self._with_trees(vector))

    def gauge(self, metric: str) -> str:
        """A gauge of vLLM's, of engines with trees."""
        return self._with_trees(self.series(metric))

    def _with_trees(self, vector: str) -> str:
        """Only the engines that have trees: vLLM's metrics have those of the others, too."""
        engines = self.series(f"{PREFIX}config_info")
        return f"{vector} and on (job, instance, model_name, engine) {engines}"


def ratio(part: str, whole: str) -> str:
    """Without a value where there is no whole, such as without traffic."""
    return f"{part} / ({whole} > 0)"


def quantile(s: Scope, share: float, histogram: str) -> str:
    return f"histogram_quantile({share}, {s.per('le').rate(histogram + '_bucket')})"


def per_depth(vector: str) -> str:
    """The vector with depths of two digits, so that their order as text is that of the numbers.

    Prometheus orders the series of a range query by their labels as text, whatever sorts them
    within the query; and `sort_by_label` is experimental. No tree is deeper than 64.
    """
    return f'label_replace({vector}, "depth", "0$1", "depth", "(.)")'


def request_steps(s: Scope) -> str:
    return s.rate(f"{PREFIX}tree_nodes_count")


def accepted(s: Scope) -> str:
    return s.rate(f"{PREFIX}accepted_path_tokens_sum")


def verified(s: Scope) -> str:
    return s.rate(f"{PREFIX}tree_nodes_sum")


def acceptance_length(s: Scope) -> str:
    return f"1 + {ratio(accepted(s), request_steps(s))}"


def tokens_per_step(s: Scope) -> str:
    steps = s.rate(f"{PREFIX}stage_seconds_count", 'stage="target"')
    return ratio(f"({accepted(s)} + {request_steps(s)})", steps)


def speed(s: Scope) -> str:
    seconds = f"{PREFIX}compared_seconds_total"
    return ratio(s.rate(seconds, 'decoding="plain"'), s.rate(seconds, 'decoding="tree"'))


def node_efficiency(s: Scope) -> str:
    return ratio(accepted(s), verified(s))


def calibration(s: Scope) -> str:
    estimated = s.rate(f"{PREFIX}estimated_accepted_tokens_total")
    return ratio(s.rate(f"{PREFIX}accepted_nodes_total"), estimated)


def acceptance_by_source(s: Scope) -> str:
    """Share of a source's verified nodes that were accepted."""
    s = s.per("source")
    accepted = s.rate(f"{PREFIX}accepted_nodes_by_source_total")
    return ratio(accepted, s.rate(f"{PREFIX}proposed_nodes_by_source_total"))


def tokens_by_source(s: Scope) -> str:
    """Share of the accepted tokens that a source brought."""
    accepted = f"{PREFIX}accepted_nodes_by_source_total"
    return f"{s.per('source').rate(accepted)} / scalar({s.rate(accepted)} > 0)"


def calibration_by_source(s: Scope) -> str:
    s = s.per("source")
    estimated = s.rate(f"{PREFIX}estimated_accepted_tokens_by_source_total")
    return ratio(s.rate(f"{PREFIX}accepted_nodes_by_source_total"), estimated)


def fallback_share(s: Scope) -> str:
    """Of steps whose tree had to be a chain. That there is no node is an adaptive budget's choice
    where rows are dear."""
    return ratio(s.rate(f"{PREFIX}fallback_steps_total", 'reason!="empty_tree"'), request_steps(s))


def fallback_by_reason(s: Scope) -> str:
    """Of all steps of requests, which have no reason: they are summed over the same models."""
    steps = f"scalar({request_steps(s)} > 0)"
    return f"{s.per('reason').rate(PREFIX + 'fallback_steps_total')} / {steps}"


def drafting_share(s: Scope) -> str:
    seconds = f"{PREFIX}stage_seconds_sum"
    return ratio(s.rate(seconds, 'stage=~"catch_up|draft"'), s.rate(seconds))


RECORDED = {
    "model_name:dyntree_acceptance_length:mean5m": acceptance_length,
    "model_name:dyntree_tokens_per_step:mean5m": tokens_per_step,
    "model_name:dyntree_speed:ratio5m": speed,
    "model_name:dyntree_node_efficiency:ratio5m": node_efficiency,
    "model_name:dyntree_calibration:ratio5m": calibration,
    "model_name:dyntree_fallback_share:ratio5m": fallback_share,
    "model_name:dyntree_drafting_share:ratio5m": drafting_share,
    "model_name:dyntree_request_steps:rate5m": request_steps,
}
"""What Prometheus records for the alerts, over 5 minutes and by model."""
