//! The development certificate: for this machine alone, made at the first start where none is configured.

use std::{
    fs::{self, File},
    io,
    path::Path,
    time::{Duration, SystemTime},
};

use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer,
    KeyPair, KeyUsagePurpose,
};

use super::{TlsError, is_there};
use crate::{atomic_file, config};

/// The issuer of every development certificate, by which it is known again at the next start.
pub(super) const AUTHORITY: &str = "Tollgate development CA";

/// Where a development certificate is good for.
pub(super) const NAMES: [&str; 3] = ["localhost", "127.0.0.1", "::1"];

/// The longest life that Apple's systems accept of a certificate that was added by hand.
const DAYS: u32 = 825;

const DAY: Duration = Duration::from_secs(86_400);

/// Makes the pair, unless another process that shares the folder was faster.
pub(super) fn make(tls: &config::Tls) -> Result<(), TlsError> {
    let cant_write = |folder: &Path| {
        let folder = folder.to_owned();
        move |source: io::Error| TlsError::Write { folder, source }
    };
    let folders = [&tls.private_key, &tls.certificate].map(|path| atomic_file::folder(path));
    for folder in folders {
        fs::create_dir_all(folder).map_err(cant_write(folder))?;
    }
    let _lock = lock(tls);
    if is_there(tls)? {
        return Ok(());
    }
    let (certificate, key) =
        sign(SystemTime::now()).map_err(|source| TlsError::Make { path: tls.certificate.clone(), source })?;
    atomic_file::create(&tls.private_key, key.as_bytes(), 0o600).map_err(cant_write(folders[0]))?;
    atomic_file::create(&tls.certificate, certificate.as_bytes(), 0o644).map_err(|source| {
        // A key alone would stop the next start.
        let _ = fs::remove_file(&tls.private_key);
        cant_write(folders[1])(source)
    })
}

/// Held by the one process that makes the pair.
pub(super) fn lock(tls: &config::Tls) -> Option<File> {
    atomic_file::lock_folder(&tls.private_key)
}

/// A certificate for this machine and its key, as PEM. Behind it stands the CA that signed it, so that the one file is
/// also what a client is told to trust. The CA's key is gone when this returns: nobody can ever sign with it.
fn sign(now: SystemTime) -> Result<(String, String), rcgen::Error> {
    let yesterday = now - DAY;
    let mut authority = params(&[], AUTHORITY, yesterday)?;
    authority.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    authority.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    let authority_key = KeyPair::generate()?;
    let authority_certificate = authority.self_signed(&authority_key)?;

    let mut leaf = params(&NAMES, "localhost", yesterday)?;
    leaf.is_ca = IsCa::ExplicitNoCa;
    leaf.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    leaf.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
    // Strict clients, such as Python since 3.13, refuse a certificate without it.
    leaf.use_authority_key_identifier_extension = true;
    let leaf_key = KeyPair::generate()?;
    let leaf_certificate = leaf.signed_by(&leaf_key, &Issuer::new(authority, authority_key))?;
    Ok((leaf_certificate.pem() + &authority_certificate.pem(), leaf_key.serialize_pem()))
}

fn params(names: &[&str], subject: &str, from: SystemTime) -> Result<CertificateParams, rcgen::Error> {
    let mut certificate =
        CertificateParams::new(names.iter().copied().map(str::to_owned).collect::<Vec<_>>())?;
    certificate.distinguished_name = DistinguishedName::new();
    certificate.distinguished_name.push(DnType::CommonName, subject);
    certificate.not_before = from.into();
    certificate.not_after = (from + DAY * DAYS).into();
    Ok(certificate)
}
