"""Run trees and their state."""
