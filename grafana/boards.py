"""The dashboards."""

from __future__ import annotations

import at_a_glance
import in_depth
import per_engine
from page import dashboard

DASHBOARDS = {
    "tree_at_a_glance": dashboard(
        "dyntree-glance",
        "Tree at a glance",
        "Does the token tree pay?",
        at_a_glance.rows(),
    ),
    "tree_in_depth": dashboard(
        "dyntree-depth",
        "Tree in depth",
        "Where the tree's tokens come from, and where its time goes.",
        in_depth.rows(),
    ),
    "per_model_and_engine": dashboard(
        "dyntree-engines",
        "Per model and engine",
        "The same figures for every model, server and engine.",
        per_engine.rows(),
    ),
}
