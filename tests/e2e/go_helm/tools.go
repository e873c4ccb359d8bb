//go:build tools

// Package helm pins the helm command with which the tests look at the chart.
package helm

import _ "helm.sh/helm/v3/cmd/helm"
