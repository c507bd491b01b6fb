"""`dyntree dashboards`: Grafana's dashboards and Prometheus' rules."""
