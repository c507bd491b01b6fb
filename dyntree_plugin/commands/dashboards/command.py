"""Write the files into a folder, and say what to do with them."""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path

from dyntree_plugin.commands.dashboards import files
from dyntree_plugin.commands.paths import check_new_folder

_NEXT = """\
{count} files are in {folder}. To start Prometheus and Grafana for a server at port 8000:

    docker compose -f {quoted}/grafana/compose.yaml up

With your own: add grafana/prometheus/recording.yml and alerts.yml to the rules of Prometheus,
give its scrape job of vLLM the metric_relabel_configs of prometheus.yml, and import
grafana/dashboards/*.json into Grafana.
"""


def write(folder: Path, *, force: bool) -> str:
    """Make a folder and write the files into it; return what to do next.

    Raises:
        ValueError: if it cannot be written, or is not empty. With ``force``, files of these names
            are replaced, and others are left; symbolic links in their places are refused.
        OSError: if writing fails.
    """
    check_new_folder("DIR", folder)
    every = files.installed()
    if not force and folder.is_dir() and any(folder.iterdir()):
        raise ValueError(
            f"{folder} is not empty: name another folder, or give --force, which replaces files "
            "of the same names and leaves others"
        )
    for name in every:
        for path in (Path(name), *Path(name).parents[:-1]):
            if (folder / path).is_symlink():
                raise ValueError(f"{folder / path} is a symbolic link: remove it")
    for name, source in every.items():
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)
    return _NEXT.format(count=len(every), folder=folder, quoted=shlex.quote(str(folder)))
