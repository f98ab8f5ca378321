"""The gRPC door, TEI's ``tei.v1``: read by the same functions as the HTTP routes. Imported only where it is opened."""
