//! TLS of the public listener, by rustls.

use std::path::Path;
use std::sync::Arc;

use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::TlsAcceptor;

/// Reads a certificate chain and its key, both PEM.
///
/// # Errors
/// When a file cannot be read, or the two do not belong together; the error names the file.
pub fn acceptor(certificates: &Path, key: &Path) -> Result<TlsAcceptor, String> {
    let at = |path: &Path, error: &dyn std::fmt::Display| format!("{}: {error}", path.display());
    let chain: Vec<CertificateDer<'_>> = CertificateDer::pem_file_iter(certificates)
        .and_then(Iterator::collect)
        .map_err(|error| at(certificates, &error))?;
    if chain.is_empty() {
        return Err(at(certificates, &"holds no certificate"));
    }
    let key_der = PrivateKeyDer::from_pem_file(key).map_err(|error| at(key, &error))?;
    let config = rustls::ServerConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
        .with_safe_default_protocol_versions()
        .map_err(|error| error.to_string())?
        .with_no_client_auth()
        .with_single_cert(chain, key_der)
        .map_err(|error| at(certificates, &error))?;
    Ok(TlsAcceptor::from(Arc::new(config)))
}
