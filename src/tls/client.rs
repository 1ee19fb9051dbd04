//! The client's side of TLS: whom Tollgate trusts, and who it is.

use std::{path::Path, sync::Arc};

use rustls::{
    ClientConfig, RootCertStore,
    version::{TLS12, TLS13},
};

use super::{
    TlsError,
    pem::{certificates_in, key_in},
    provider, unusable,
};
use crate::config::{self, ClientCertificate};

/// How upstreams are spoken to: judged by the system's roots or by the certificates in `ca_file` alone, shown a
/// certificate where one is configured, and offered HTTP/2 where that is asked for (RFC 7301).
///
/// The system's store is read whole for every upstream without a `ca_file`.
pub fn upstream_config(connection: &config::Connection) -> Result<Arc<ClientConfig>, TlsError> {
    let mut config = client_config(connection.ca_file.as_deref(), connection.client_certificate.as_ref())?;
    if connection.http2 {
        config.alpn_protocols.push(b"h2".into());
    }
    config.alpn_protocols.push(b"http/1.1".into());
    Ok(Arc::new(config))
}

/// How a shared store is spoken to: judged by the system's roots or by the certificates in its `ca_file` alone, and shown
/// a certificate where one is configured.
pub fn store_config(store: &config::Redis) -> Result<Arc<ClientConfig>, TlsError> {
    client_config(store.ca_file.as_deref(), store.client_certificate.as_ref()).map(Arc::new)
}

fn client_config(
    ca_file: Option<&Path>,
    identity: Option<&ClientCertificate>,
) -> Result<ClientConfig, TlsError> {
    let roots = ca_file.map_or_else(system_roots, roots_in)?;
    let builder = ClientConfig::builder_with_provider(provider())
        .with_protocol_versions(&[&TLS13, &TLS12])
        .expect("aws-lc-rs has cipher suites for both versions")
        .with_root_certificates(roots);
    let Some(ClientCertificate { certificate, private_key }) = identity else {
        return Ok(builder.with_no_client_auth());
    };
    let chain = certificates_in(certificate)?;
    let config = builder.with_client_auth_cert(chain, key_in(private_key)?);
    config.map_err(|source| unusable(certificate, private_key, source))
}

pub(super) fn roots_in(path: &Path) -> Result<RootCertStore, TlsError> {
    let mut roots = RootCertStore::empty();
    for certificate in certificates_in(path)? {
        roots.add(certificate).map_err(|source| TlsError::BadRoot { path: path.into(), source })?;
    }
    Ok(roots)
}

/// One odd certificate among a system's hundreds is no reason not to start.
fn system_roots() -> Result<RootCertStore, TlsError> {
    let found = rustls_native_certs::load_native_certs();
    let mut roots = RootCertStore::empty();
    roots.add_parsable_certificates(found.certs);
    if roots.is_empty() {
        return Err(TlsError::NoRoots { source: found.errors.into_iter().next() });
    }
    Ok(roots)
}
