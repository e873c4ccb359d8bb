"""Compatibility with gpu-manager and HAMi: their interfaces, and plans for the migration of a node to gpumgr.

A plan only prints the commands that delete or stop something; an operator runs them.
"""
