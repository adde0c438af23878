"""Mixture of experts: router, expert layers, shared experts."""
