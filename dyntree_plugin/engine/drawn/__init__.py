"""What ``exactness: distribution`` serves: how trees and chains are drawn, and what is accepted."""
