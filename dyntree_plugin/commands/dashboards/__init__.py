"""`dyntree dashboards`: Grafana's dashboards, Prometheus' rules and examples of deployment."""
