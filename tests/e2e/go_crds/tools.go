//go:build tools

// Package crds pins the kinds of Prometheus Operator, which lie beside the code of its module.
package crds

import _ "github.com/prometheus-operator/prometheus-operator/pkg/versionutil"
