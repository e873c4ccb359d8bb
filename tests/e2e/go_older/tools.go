//go:build tools

// Package older pins the kubelet of an older release, which one test runs.
package older

import _ "k8s.io/kubernetes/cmd/kubelet"
