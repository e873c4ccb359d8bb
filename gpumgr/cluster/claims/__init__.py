"""The controller `gpumgr claims`: templates for the claims of vcuda pods on DRA nodes, and scheduling gates that keep pods within the
quotas of their namespaces."""
