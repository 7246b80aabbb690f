#!/usr/bin/env bash
# Prints the rules of deploy/monitoring as a PrometheusRule, from which the Prometheus operator takes rules. Kustomize can
# put a file into a ConfigMap but not into a custom resource.
set -euo pipefail
cat <<'END'
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: logprobd
  labels:
    app.kubernetes.io/name: logprobd
spec:
END
sed 's/^/  /' "$(dirname "${BASH_SOURCE[0]}")/../../monitoring/prometheus/logprobd.rules.yml"
