"""The controller `gpumgr claims`: templates for the claims of vcuda pods on DRA nodes, and the quota gate of their namespaces."""
