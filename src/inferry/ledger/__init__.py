"""The ledger: recorder, schema, queries and stores."""
