"""Attention backends that carry trees and plain requests in one batch."""
