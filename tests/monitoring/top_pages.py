"""Made-up metrics pages for the tests of `dyntree top`."""

from __future__ import annotations

from dyntree_plugin.commands.top.page import Page, parse
from dyntree_plugin.metrics.names import PREFIX


def page(steps: int, engine: str = "0", seconds: float = 0.0) -> Page:
    """Return the page of an engine after ``steps`` steps of 12 nodes each, 3 of them accepted."""
    made = parse(text(steps, engine))
    return Page(seconds, made.engines)


def text(steps: int, engine: str = "0") -> str:
    values = {
        f'{PREFIX}config_info{{LABELS,version="1",node_budget="16"}}': 1,
        f"{PREFIX}node_budget{{LABELS}}": 16,
        f"{PREFIX}tree_nodes_count{{LABELS}}": steps,
        f"{PREFIX}tree_nodes_sum{{LABELS}}": 12 * steps,
        f"{PREFIX}accepted_path_tokens_sum{{LABELS}}": 3 * steps,
        f'{PREFIX}accepted_nodes_total{{LABELS,depth="1"}}': 2 * steps,
        f'{PREFIX}accepted_nodes_total{{LABELS,depth="2"}}': steps,
        f'{PREFIX}accepted_nodes_by_source_total{{LABELS,source="draft"}}': 2 * steps,
        f'{PREFIX}accepted_nodes_by_source_total{{LABELS,source="look_up"}}': steps,
        f'{PREFIX}accepted_nodes_by_source_total{{LABELS,source="both"}}': 0,
        f'{PREFIX}estimated_accepted_tokens_total{{LABELS,depth="1"}}': 2 * steps,
        f'{PREFIX}fallback_steps_total{{LABELS,reason="logits_processors"}}': steps / 10,
        f'{PREFIX}fallback_steps_total{{LABELS,reason="empty_tree"}}': steps / 2,
        f'{PREFIX}stage_seconds_sum{{LABELS,stage="target"}}': 0.02 * steps,
        f'{PREFIX}stage_seconds_count{{LABELS,stage="target"}}': steps / 2,
        f'{PREFIX}compared_seconds_total{{LABELS,decoding="tree"}}': 0.1 * steps,
        f'{PREFIX}compared_seconds_total{{LABELS,decoding="plain"}}': 0.2 * steps,
        "vllm:generation_tokens_total{LABELS}": 4 * steps,
        "vllm:num_requests_running{LABELS}": 3,
    }
    labels = f'model_name="m",engine="{engine}"'
    return "".join(f"{k.replace('LABELS', labels)} {v}\n" for k, v in values.items())
