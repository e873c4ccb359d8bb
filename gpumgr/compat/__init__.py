"""Compatibility with gpu-manager and HAMi: their interfaces, and the migration of a node from one of them to gpumgr.

A migration plan has the changes, their order and the way back. It only names the commands that delete or stop something.
"""
