"""`gpumgr scheduler`: an extender of kube-scheduler that chooses node and GPUs (docs/scheduler.md)."""
